"""Model files: scanned, checked, mapped, watched and compared with those of other processes."""
