"""What every process needs of the operating system: startup, private folders, files, log lines."""
