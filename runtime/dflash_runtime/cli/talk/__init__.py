"""A chat in a terminal: `dialogue` asks the engine, `commands` are what begins with a slash,
`reading` and `history` take what is typed, `views` and `markdown` show answers, `loop` is the talk.
"""
