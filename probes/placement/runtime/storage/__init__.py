"""How a placed block is stored: where its values come from, how its bytes lie, the memory they lie in."""
