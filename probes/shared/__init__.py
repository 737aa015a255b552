"""The vocabulary of both programs: quantities, quoting, files, output. Imports nothing else of either."""
