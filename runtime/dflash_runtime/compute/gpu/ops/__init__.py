"""Operations of a layer, composed of launches."""
