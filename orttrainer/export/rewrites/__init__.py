"""torch functions that the exporters get wrong or lack, in functions that export as they are: one file a family."""
