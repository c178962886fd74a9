"""From a prompt to rows of a graph: frozen pass, linear maps, targets, selection of rows, influence."""
