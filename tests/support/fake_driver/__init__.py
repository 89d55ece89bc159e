"""A fake GPU driver library."""
