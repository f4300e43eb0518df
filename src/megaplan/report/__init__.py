"""`megaplan report`: one self-contained HTML page about a plan.

`document` makes the data of the page (`megaplan.report/1`) from an estimate, `timeline` its part over time, `formulas` its explanations,
and `page` puts data, style, scripts and the bundled uPlot (`vendor/uplot`) into one file. The scripts in `page/` draw the document by its
`kind`; another kind of input, such as the result of a search, has another `kind` of document and another script.
"""
