"""Drafters beside a small model: each a network by the protocol `Network`, around another model or without one."""

from speccascade.drafters.frequent import frequent as frequent
from speccascade.drafters.frequent import frequent_tokens as frequent_tokens
from speccascade.drafters.hidden import beside as beside
from speccascade.drafters.one_pass import one_pass as one_pass
from speccascade.drafters.translation import translated as translated
