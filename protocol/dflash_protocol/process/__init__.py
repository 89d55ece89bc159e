"""What each of our processes asks of its machine: folders, streams, the service manager."""
