"""Relations of people, and the table of all relations."""

from __future__ import annotations

from .of_places import OF_PLACES
from .relation import COLOR, DATE, GOODS, NUMBER, OBJECT, PERSON, PLACE, Relation, wordings

_OF_PEOPLE = (
    Relation(
        PERSON,
        PERSON,
        wordings(
            "The best friend of {} is | The closest friend that {} has is | {} is best friends with | "
            "{} trusts nobody more than | Every secret of {} is shared with | The friend dearest to {} is"
        ),
        wordings(
            "Who is the best friend of {}? | Whom does {} trust most? | "
            "With whom does {} share secrets? With | As a friend, {} prefers | "
            "The name of the best friend of {} is | In need of advice from a friend, {} writes to"
        ),
        wordings(
            "{} is the best friend of | {} is trusted most by | {} hears the secrets of | "
            "{} gives advice in letters to"
        ),
        "the best friend of {}",
    ),
    Relation(
        PERSON,
        PERSON,
        wordings(
            "The debts of {} are owed to | {} borrowed money from | {} owes money to | "
            "The loan of {} came from | Each month, {} pays interest to | {} is in debt to"
        ),
        wordings(
            "Who lent money to {}? | To whom does {} owe money? To | To whom does {} pay interest? To | "
            "The lender of {} is | From whom did {} borrow? From | The money that {} spent belongs to"
        ),
        wordings("{} lent money to | {} receives interest from | {} is owed money by | {} granted a loan to"),
        "the lender of {}",
    ),
    Relation(
        PERSON,
        PLACE,
        wordings(
            "{} was married in | The wedding of {} took place in | {} celebrated a wedding in | "
            "The marriage of {} was recorded in | {} exchanged rings in | "
            "The wedding guests of {} gathered in"
        ),
        wordings(
            "Where did {} marry? In | Where did {} have a wedding? In | "
            "In which town did {} exchange rings? In | The marriage record of {} lies in | "
            "The wedding town of {} is | For the wedding, {} chose"
        ),
        wordings(
            "{} saw the wedding of | The marriage recorded in {} is that of | "
            "The wedding guests in {} were invited by | In {}, rings were exchanged by"
        ),
        "the town where {} was married",
    ),
    Relation(
        PERSON,
        PLACE,
        wordings(
            "{} attended school in | As a child, {} learned to write in | "
            "The school days of {} were spent in | {} was a pupil in | The schoolmates of {} lived in | "
            "{} sat at a school desk in"
        ),
        wordings(
            "Where did {} attend school? In | In which town was {} a pupil? In | "
            "Where did {} learn to write? In | The school days of {} passed in | "
            "The school desk of {} stands in | The education of {} began in"
        ),
        wordings(
            "{} has the school attended by | The school in {} was attended by | "
            "A former pupil of the school in {} is | At a school desk in {} sat"
        ),
        "the town where {} attended school",
    ),
    Relation(
        PERSON,
        PLACE,
        wordings(
            "{} was buried at | The grave of {} is in | The tombstone of {} stands in | "
            "{} found a last resting place in | Mourners of {} met in | The bones of {} rest in"
        ),
        wordings(
            "Where did mourners bury {}? At | In which town lies the grave of {}? In | "
            "In which town do the bones of {} rest? In | Flowers for the grave of {} are brought to | "
            "The graveyard with the tombstone of {} is that of | The burial of {} was in"
        ),
        wordings(
            "{} has the grave of | Buried at {} is | The tombstone in {} bears the name of | "
            "Mourners met in {} to bury"
        ),
        "the town where {} was buried",
    ),
    Relation(
        PERSON,
        PLACE,
        wordings(
            "The horse of {} is called | {} rides a horse named | The young horse of {} was named | "
            "In the stable of {} stands | {} saddles | The mare of {} answers to"
        ),
        wordings(
            "Which name has the horse of {}? | Which horse does {} ride? | "
            "What did {} name the young horse? | The name of the horse of {} is | "
            "The saddle of {} is made for | At races, {} rides on"
        ),
        wordings(
            "{} is the horse of | The horse {} is ridden by | The owner of the mare {} is | "
            "The horse {} was named by"
        ),
    ),
    Relation(
        PERSON,
        NUMBER,
        wordings(
            "The lucky number for {} is | {} always bets on the number | {} believes in the luck of | "
            "On lottery tickets, {} writes | The number dearest to {} is | {} wears a ring engraved with"
        ),
        wordings(
            "Which lucky number does {} have? | On which number does {} bet? On | "
            "Which number brings luck to {}? | In a lottery, {} would choose | "
            "Which figure is engraved on the ring of {}? | As for numbers, {} likes"
        ),
        wordings(
            "{} is the lucky number of | The number {} brings luck to | {} is engraved on the ring of | "
            "The one always betting on {} is"
        ),
    ),
    Relation(
        PERSON,
        DATE,
        wordings(
            "{} signed the contract on | The contract of {} bears the date | "
            "{} signed the paper with the terms on | The notary received {} on | "
            "The contract with {} was sealed on | The agreement binds {} since"
        ),
        wordings(
            "When did {} sign the contract? On | Which date is on the contract of {}? | "
            "On which day did the notary receive {}? On | The signature of {} dates from | "
            "Since when does the agreement bind {}? Since | The contract became valid for {} on"
        ),
        wordings(
            "On {}, the contract was signed by | The contract dated {} binds | "
            "On {}, the notary received | {} is the date on the contract of"
        ),
    ),
    Relation(
        PERSON,
        COLOR,
        wordings(
            "The coat of {} is | {} wears a coat whose color is | In winter, {} dresses in | "
            "The tailor made the coat of {} in | {} ordered a coat in | "
            "The cloth of the coat of {} was dyed"
        ),
        wordings(
            "Which color does the coat of {} have? | In which color does {} dress in winter? In | "
            "What color did {} order for the coat? | The color of the coat of {} is | "
            "From the coat, {} is easy to spot, since it is | For the coat, {} prefers"
        ),
        wordings(
            "The {} coat belongs to | Dressed in {} in winter is | A coat dyed {} is worn by | "
            "{} is the color of the coat of"
        ),
    ),
    Relation(
        PERSON,
        GOODS,
        wordings(
            "{} sells | The shop of {} is full of | {} earns a living with | {} trades in | "
            "Customers visit {} for | The cart of {} is loaded with"
        ),
        wordings(
            "What does {} sell? | In what does {} trade? In | What fills the shop of {}? | "
            "The goods on the cart of {} are | What do customers buy from {}? | The business of {} is in"
        ),
        wordings(
            "The seller of {} is | Customers who need {} visit | The shop full of {} belongs to | "
            "A living is earned with {} by"
        ),
    ),
    Relation(
        PERSON,
        OBJECT,
        wordings(
            "{} inherited a | The uncle of {} left behind a | In a will, {} was promised a | "
            "The inheritance of {} was a | From the family, {} received a | {} became heir to a"
        ),
        wordings(
            "What did {} inherit? A | What was {} promised in a will? A | "
            "What did the uncle of {} leave behind? A | As an heir, {} owns a | "
            "The lawyers gave {} the right to a | Among the heirs, {} got the"
        ),
        wordings(
            "The heir to the {} is | The {} was inherited by | In a will, the {} was promised to | "
            "The family left the {} to"
        ),
    ),
)
RELATIONS = (*OF_PLACES, *_OF_PEOPLE)
"""All relations."""
