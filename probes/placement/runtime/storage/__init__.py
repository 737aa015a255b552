"""How a placed block is stored: where its values come from, how its bytes are arranged, in which memory."""
