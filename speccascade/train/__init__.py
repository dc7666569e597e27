"""Training of T5 and decoder-only models, alone or from a teacher: `python -m speccascade.train --help`."""
