"""The model: its files, its device, its tokenizer and its forward pass. torch is only imported here."""
