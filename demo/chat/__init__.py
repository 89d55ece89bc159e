"""The demo model that chats: made talks, training on them, and how many answers are right."""
