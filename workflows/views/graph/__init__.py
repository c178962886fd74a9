"""Attribution graphs as a view: what a page is given, what is drawn, and what is said of features."""
