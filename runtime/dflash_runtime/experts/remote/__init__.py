"""Experts in daemons: requests, deadlines, circuit breaker, checks of replies."""
