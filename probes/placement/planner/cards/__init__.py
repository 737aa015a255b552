"""Plans over several equal cards: the blocks cut into stages, one a card. No torch."""
