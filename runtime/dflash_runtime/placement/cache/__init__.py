"""Which experts a device keeps where it has room for some of them: traces, policies, simulation."""
