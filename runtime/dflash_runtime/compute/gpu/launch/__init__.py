"""Launch records: for each kernel its arguments, what it is compiled for, and its grid."""
