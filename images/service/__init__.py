"""A BERT sequence classifier behind HTTP: `python3 -m service`.

Standard library, starlette, uvicorn and pyyaml; torch only in `bert` and `inference`, imported when they are.
"""
