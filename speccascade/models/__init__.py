"""Networks, and models that are made of other models."""

from speccascade.models.frequent import frequent as frequent
from speccascade.models.frequent import frequent_tokens as frequent_tokens
from speccascade.models.hidden import beside as beside
from speccascade.models.one_pass import one_pass as one_pass
from speccascade.models.translation import translated as translated
