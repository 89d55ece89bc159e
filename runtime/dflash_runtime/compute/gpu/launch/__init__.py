"""Launches: for each kernel its argument struct, the defines it is compiled with, and its grid."""
