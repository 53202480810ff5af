"""Colors of pictures, told apart by people who see no red or no green.

They are those of Okabe and Ito (https://jfly.uni-koeln.de/color/).
"""

BLACK = "#000000"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
BLUE = "#0072B2"
RED = "#D55E00"
PINK = "#CC79A7"
GREY = "#999999"
