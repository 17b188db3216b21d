"""What labels are: classes and their names, masks, segments."""
