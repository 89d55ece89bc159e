"""The shared-memory ring of a link: layout, segment files, and the compiled code that uses it."""
