"""MaxText's configurations: defaults of base.yml, files of models, recipes and arguments, as specs whose host is maxtext."""
