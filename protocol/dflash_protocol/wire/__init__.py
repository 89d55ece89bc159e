"""The wire format of a link: control messages, requests, replies, and the transport interface."""
