"""Whether a model runs on a card: doctor's, `plan`'s and `fit`'s answers, joined for one screen.

card.py     the card that a user names: its torch by the doctor's data, its memory and speeds by the probes
answer.py   `ask`: from a question to an `Answer`, which is also the JSON
text.py     prints it
"""
