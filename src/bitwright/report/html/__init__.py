"""The HTML report: one self-contained file and its data as JSON beside it.

`data` has the sections, `assemble` fills them (`bw.write_report`), `page` renders them.
"""
