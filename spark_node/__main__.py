"""`python -m spark_node` is `spark-dfl`."""

from spark_node.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
