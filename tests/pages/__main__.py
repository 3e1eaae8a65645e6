import sys

from tests.pages import main

sys.exit(main())
