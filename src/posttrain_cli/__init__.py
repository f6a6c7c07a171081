"""posttrain-cli: from raw data to a tuned model, exact, fast and honest about what it did."""

__version__ = "0.1.0"
