"""What `--help` says below the options, verb by verb."""

EXAMPLES = {
    "": """
examples:
  piebridge train efficientnet_lite0/Clipart10/ours          one of the shipped runs
  piebridge train efficientnet_lite0/Clipart10/ours data=photos output=res/photos
                                                             the same on your own folder, one sub-folder a class
  piebridge predict res/photos new.jpg                       classify with the tuned network
  piebridge table                                            compare everything that has been run
  piebridge VERB --help                                      more on each verb
""",
    "train": """
examples:
  piebridge train efficientnet_lite0/Clipart10/ours
  piebridge train efficientnet_lite0/Clipart10/ours data=~/photos output=res/photos epochs=20
  piebridge train my_config.yaml seed=1 optimizer.lr=0.003

RUN is a path below res/train_log, a folder with a config.yaml, or a YAML file (`piebridge configs ls`).
key=value changes any key of the configuration (`piebridge configs keys`); values are Python literals, texts need no quotes.
Ctrl-C saves; the same command goes on from there. A finished run is kept unless overwrite=true.
""",
    "plan": """
examples:
  piebridge plan efficientnet_lite0/Clipart10/ours
  piebridge plan efficientnet_lite0/Clipart10/ours data=~/photos loader.augment=crop_flip plan.disk=500MiB

Prints seconds, memory and disk of every strategy, and which one strategy=auto would take. Trains nothing.
""",
    "predict": """
examples:
  piebridge predict efficientnet_lite0/Clipart10/ours cat.jpg dog.png
  piebridge predict res/photos new_photos/ --top 3 > predictions.csv

Writes CSV on stdout: path, class, probability. Images that cannot be read are named on stderr and left out.
""",
    "table": """
examples:
  piebridge table                               all runs below res/; also writes res/table.csv
  piebridge table res/quickstart --markdown
  piebridge table output=comparison.csv
  piebridge table --document doc/results.md

Means over seeds; the spread is the sample standard deviation. Only finished runs count; the others are listed below the table.
In a document, a table stands between a line `<!-- records: FOLDER ... -->`, with folders of runs relative to the document,
and a line `<!-- end of records -->`; what is between them is replaced.
""",
    "compare": """
examples:
  piebridge compare res/train_log res/expected/jetson_tx2        beside the published results
  piebridge compare res/train_log res/expected/x86_2_cores --tolerance 3
  piebridge compare res res/train_log/table.csv --csv            beside a table of another machine

EXPECTED holds a row per network, data set and method, as `piebridge table` writes them; res/expected/README.md has the columns.
A run is set beside the row that agrees in network, data set, method and, where the row states them, epochs, PET kind and images.
Verdict: within the tolerance, better, outside (worse), not run. Speeds are compared as ratios to PET and FTAll, each on its own
machine. The exit status is 0 whatever the verdicts; scripts find those with --csv or --json.
""",
    "plot": """
examples:
  piebridge plot                                all runs below res/, into res/plot.png
  piebridge plot res/quickstart output=quickstart.png
""",
    "data": """
examples:
  piebridge data                                what there is, and what is here already
  piebridge data Openclipart
  piebridge data Openclipart source=openclipart-png.deb
""",
    "forge": """
examples:
  piebridge forge efficientnet_lite0 --images photos --out proxynetworks/lite0
  piebridge forge efficientnet_lite0 --images photos --out proxynetworks/lite0 levels=6 least=0.3 align=blocks
  piebridge forge --profile proxynetworks/lite0          measure it on this device
  piebridge forge --show proxynetworks/lite0             what is in the set
  piebridge forge --show resnet50                        blocks, what pruning may cut inside them, costs, taps

Train with it: piebridge train efficientnet_lite0/Clipart10/ours proxies.set=proxynetworks/lite0

Proxies are pruned inside the blocks, see smaller images, drop blocks, compute in int8, and are aligned with the original's
features; the set keeps those that no other one beats in both time and alignment. Images need no labels. Interrupted, it goes on
where it was. Settings, with their defaults:
  levels=10 least=0.2        proxies to keep; the cheapest one's time over the original's
  images=1024 held_out=128   images to fit on, and to measure on
  widths=4 narrowest=0.4 multiple=8 drops=2 resolutions=192,160,128,96 precisions=float,int8        what to try
  align=closed               of pruned widths: none, statistics, closed, blocks
  policy=true policy_epochs=20 profile_seconds=60 batch_sizes=1,4,32 batch_size=8 workers=auto seed=0
  overwrite=false
""",
    "engine": """
examples:
  piebridge engine show mobilenet_v2                                   what is trained, and every byte of a step, before it runs
  piebridge engine show efficientnet_lite0 scheme=last_block batch_size=4 --out memory.png
  piebridge engine search efficientnet_lite0 data=Clipart10 --memory 16MiB --out lite0.yaml
  piebridge engine compile efficientnet_lite0 scheme=lite0.yaml classes=10 --out step.safetensors
  piebridge engine bench                                               beside PyTorch, on four networks
  piebridge engine bench resnet50 scheme=resnet50 --json

A scheme is a preset (bias_only, full, head, last_block, mobilenet_v2, resnet50, ...), a YAML file, or YAML text. Settings:
  batch_size=8 image_size=0 classes=0 optimizer=sgd|adamw momentum=0.0 is_training=false off=PASS,... seed=0
  candidates=all tolerance=0.01 turns=7                                compile and bench
  data=NAME|DIR batches=8 contribution=fisher|runs method=knapsack|evolution        search
""",
    "configs": """
examples:
  piebridge configs ls
  piebridge configs show efficientnet_lite0/Clipart10/ours epochs=3      every key as it would be used
  piebridge configs keys                                                 every key, its default and what it does
""",
    "doctor": """
examples:
  piebridge doctor
  piebridge doctor --json > doctor.json
""",
}
