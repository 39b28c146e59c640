"""Views of dumped search trees."""
