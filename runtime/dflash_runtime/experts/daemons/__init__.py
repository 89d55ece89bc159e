"""Daemon processes and links to them: launched, greeted, watched, revived."""
