"""Operations of a layer, put together from launches."""
