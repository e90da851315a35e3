"""The load generator behind `dragoman load`.

Pure: `schedule` (arrivals and texts), `distribution` (percentiles), `knee` (the search for the highest rate that
holds), `report` (what comes out, and its JSON). With side effects: `generator` (gRPC), `table`, `plot`, and `command`,
which puts them together.
"""
