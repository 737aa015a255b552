"""What fits into a memory budget: the largest batch and the longest sequence, predicted and measured.

report: the question, the answer, and its file. answer: puts the answer together.
Prediction (needs no torch): tape counts the bytes alive in a forward and a backward pass, architectures
writes models as operations on it, forecast finds the peak and the largest size.
Measurement: worker tries sizes in forks of a process, search chooses them, trial runs one, step is a real
training step or pass, limits are the caps.
"""
