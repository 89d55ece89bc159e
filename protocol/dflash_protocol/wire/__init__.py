"""What goes over a link: messages, requests and replies, and how payload is written in them."""
