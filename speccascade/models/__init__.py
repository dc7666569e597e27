"""Networks, and models that are made of other models."""

from speccascade.models.translation import translated as translated
