"""FlexFloor inside of verl. Nothing is imported here: Ray unpickles names of this package while verl is importing."""
