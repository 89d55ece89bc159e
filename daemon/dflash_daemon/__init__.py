"""The expert-compute daemon: a process that computes experts for parents.

`lifecycle` starts and stops it, `control` does handshakes and heartbeats, `service` serves requests
on the compute thread, `data_paths` has the transports, `host` has the model's experts,
`authentication` checks clients' keys.
"""
