"""The report of an experiment: everything here is a function of the dict that `results.json` holds.

`points` reads the measured points, `tables` derives the tables, `charts` describes each chart
once and `drawing` draws it for page and files; `formats` and `page` write text and HTML, `outputs` all files.
"""

from speccascade.evaluate.report import formats as formats
from speccascade.evaluate.report import tables as tables
from speccascade.evaluate.report.outputs import warned as warned
from speccascade.evaluate.report.outputs import write as write
