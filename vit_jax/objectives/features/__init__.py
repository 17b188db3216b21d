"""Learning the features of other models, without labels. Imported when a config names it."""
