"""The harness: plans, their proof and their uses.

Four consumers take any plan (docs/adr/0001): `verify`, `execute`, `memory` and `simulate`.

A folder imports folders of lower floors only; folders of one floor never import one another.
The import contracts in pyproject.toml keep it so. The top-level packages `patterns` (floor 0: who
attends whom, as geometry) and `strategies` (floor 8) are part of the picture.

| floor | folder      | what it holds                                                              |
|-------|-------------|----------------------------------------------------------------------------|
| 16    | commands    | one file per verb: parse, call, print (`cli` gathers them)                 |
| 15    | terminal    | what verbs share: arguments and their help, tables, progress               |
| 14    | calibrate   | measure this machine and write a cluster file                              |
| 13    | attention   | context parallelism for a user's own model                                 |
| 13    | measure     | run cells on real ranks and time them                                      |
| 13    | fit         | fit a calibration to tables of measurements                                |
| 12    | recommend   | which strategy for a problem on a cluster, and how sure that is            |
| 11    | check       | is a strategy equal to the oracle? cells, the default grid, the runner     |
| 11    | sweep       | suites of cells, and the simulation of those that are simulated            |
| 11    | page        | results as one HTML page: answer, heat tables, charts, every cell          |
| 11    | reproduce   | published figures beside ours                                              |
| 10    | explain     | is a configuration supported? volumes, and the nearest supported ones      |
| 10    | prepare     | what cells run and are priced by: plans of both directions, scalable plans |
| 10    | report      | from records to tables and summaries                                       |
| 10    | training    | a model's training step: memory, longest context, seconds                  |
| 9     | proved      | plan and prove: the one way to a plan that may be used, remembered         |
| 8     | strategies  | planners: who computes what and who sends what, one short file each        |
| 7     | schedule    | passes from plan to plan: fuse, batch, collectives, order                  |
| 7     | peers       | adapters that run other projects' context parallelism on our inputs        |
| 7     | play        | device programs at work: on streams, over groups, under adverse timings    |
| 6     | planning    | building blocks of strategies: builder, rings, all-to-alls, layers         |
| 6     | program     | what each rank's GPU is told: emitted from a plan, and proved              |
| 6     | simulate    | seconds of a plan on a cluster                                             |
| 6     | oracle      | dense attention in float64, inputs, and the one tolerance                  |
| 6     | records     | configurations of cells, and their results                                 |
| 5     | cluster     | machines: datasheets and calibrations                                      |
| 5     | verify      | the proof that a plan computes attention                                   |
| 5     | memory      | bytes that a plan holds on each rank                                       |
| 5     | execute     | plans on tensors: kernels, transports, the interpreter                     |
| 4     | plan        | the plan: problem, tasks, chunks, heads, readiness, kernel calls           |
| 4     | ranks       | processes: a team on this machine, or the ranks of a launcher              |
| 3     | base        | files, numbers, caches, workers                                            |
| 2     | errors      | public exceptions                                                          |
"""
