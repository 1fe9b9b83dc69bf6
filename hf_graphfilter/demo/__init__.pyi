from .fine_tuning import quiet_arguments as quiet_arguments
from .first_look import run_first_look as run_first_look
from .pairs import result_rows as result_rows
from .pairs import run_demo as run_demo
from .snippets import Snippets as Snippets
from .snippets import load_snippets as load_snippets
from .snippets import pretrained_path as pretrained_path
