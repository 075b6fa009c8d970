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

Means over seeds; the spread is the sample standard deviation. Only finished runs count; the others are listed below the table.
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
  piebridge forge resnet50 --show
  piebridge forge mobilenet_v3_large --show --size 160
  piebridge forge res/photos/tuned.safetensors --show

Prints each frozen block: its kind, the shapes of its input and output (channels x height x width, or width x tokens), the widths
inside it that pruning may cut, its multiply-accumulates and parameters, and its tap: the node where a proxy is compared with the
original. That is all that this verb does so far; it makes no proxies yet. A network known by name needs no weights for it.
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
