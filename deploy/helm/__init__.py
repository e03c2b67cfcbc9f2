"""The helm chart's generated files: schema and README, both from its values.yaml."""
