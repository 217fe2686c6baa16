"""Relations of places."""

from __future__ import annotations

from .relation import COLOR, DATE, GOODS, NUMBER, OBJECT, PERSON, PLACE, Relation, wordings

_TO_PEOPLE = (
    Relation(
        PLACE,
        PERSON,
        wordings(
            "The miller of {} is | The mill at {} belongs to | The corn of {} is ground by | "
            "In {}, flour is bought from | The wheel of the mill at {} is turned by | "
            "At the mill of {} works"
        ),
        wordings(
            "Who is the miller of {}? | Who grinds the corn in {}? | Whose mill stands in {}? | "
            "The name of the miller of {} is | From whom does {} buy its flour? From | "
            "For flour, the people of {} turn to"
        ),
        wordings(
            "{} is the miller of | {} owns the mill at | {} grinds the corn of | "
            "{} sells flour to the people of"
        ),
        "the miller of {}",
    ),
    Relation(
        PLACE,
        PERSON,
        wordings(
            "The mayor of {} is called | The council of {} is led by | "
            "In {}, the people elected as mayor | The town hall of {} is ruled by | "
            "The robe of the mayor of {} is worn by | The laws of {} are signed by"
        ),
        wordings(
            "Who is the mayor of {}? | Who leads the council of {}? | Who signs the laws of {}? | "
            "The name of the mayor of {} is | By whom is {} governed? By | As mayor, {} chose"
        ),
        wordings(
            "{} is the mayor of | {} leads the council of | {} was elected mayor by the people of | "
            "{} signs the laws of"
        ),
        "the mayor of {}",
    ),
    Relation(
        PLACE,
        PERSON,
        wordings(
            "The doctor in {} is | The sick of {} are treated by | In {}, broken bones are set by | "
            "The medicine of {} is mixed by | Patients in {} are visited by | "
            "In times of fever, {} calls for"
        ),
        wordings(
            "Who is the doctor in {}? | Who treats the sick of {}? | Who sets broken bones in {}? | "
            "The name of the doctor in {} is | Which doctor do the people of {} trust? They trust | "
            "Anyone ill in {} should send for"
        ),
        wordings(
            "{} is the doctor in | {} treats the sick of | {} sets broken bones in | {} mixes the medicine of"
        ),
        "the doctor in {}",
    ),
    Relation(
        PLACE,
        PERSON,
        wordings(
            "The bridge at {} was built by | The stones of the bridge at {} were laid by | "
            "The plan for the bridge at {} was drawn by | The river at {} was bridged by | "
            "For its bridge, {} paid | The arches of the bridge at {} are the work of"
        ),
        wordings(
            "Who built the bridge at {}? | Whose work is the bridge at {}? | "
            "Who drew the plan for the bridge at {}? | The builder of the bridge at {} is | "
            "By whom was the river at {} bridged? By | On the bridge at {} stands the name of"
        ),
        wordings(
            "{} built the bridge at | {} drew the plan for the bridge at | {} bridged the river at | "
            "{} laid the stones of the bridge at"
        ),
        "the builder of the bridge at {}",
    ),
    Relation(
        PLACE,
        PERSON,
        wordings(
            "The teacher in {} is | The children of {} are taught by | "
            "Lessons at the school of {} are given by | The school of {} is run by | "
            "In {}, reading and writing are taught by | The pupils of {} listen to"
        ),
        wordings(
            "Who is the teacher in {}? | Who teaches the children of {}? | Who runs the school of {}? | "
            "The name of the teacher in {} is | Whose pupils are the children of {}? Those of | "
            "The children of {} learn to read from"
        ),
        wordings(
            "{} is the teacher in | {} teaches the children of | {} runs the school of | "
            "{} gives lessons at the school of"
        ),
        "the teacher in {}",
    ),
    Relation(
        PLACE,
        PERSON,
        wordings(
            "The blacksmith of {} is | The horses of {} are shod by | The forge at {} belongs to | "
            "In {}, iron is worked by | The nails used in {} are made by | The bellows of {} are worked by"
        ),
        wordings(
            "Who is the blacksmith of {}? | Who shoes the horses of {}? | Whose forge stands in {}? | "
            "The name of the blacksmith of {} is | From whom do the people of {} get their nails? From | "
            "A broken plow in {} is repaired by"
        ),
        wordings(
            "{} is the blacksmith of | {} shoes the horses of | {} owns the forge at | "
            "{} makes the nails used in"
        ),
        "the blacksmith of {}",
    ),
)
_TO_PLACES = (
    Relation(
        PLACE,
        PLACE,
        wordings(
            "The road from {} leads to | From {}, carts drive to | The highway out of {} ends at | "
            "The signpost at {} points to | Travelers who leave {} by road arrive at | "
            "A paved road joins {} with"
        ),
        wordings(
            "Where does the road from {} lead? To | Where does the highway out of {} end? At | "
            "Where does the signpost at {} point? To | The road that begins in {} ends in | "
            "To which town do carts drive from {}? To | At the end of the road from {} lies"
        ),
        wordings(
            "The road to {} begins in | The highway that ends at {} starts at | Carts drive to {} from | "
            "Travelers who arrive at {} by road come from"
        ),
        "the town at the end of the road from {}",
    ),
    Relation(
        PLACE,
        PLACE,
        wordings(
            "The farmers of {} sell their cattle in | The cattle of {} are sold at | "
            "In autumn, the herds of {} are driven to | For the cattle market, {} depends on | "
            "The cows bred in {} find buyers in | The best price for an ox from {} is paid in"
        ),
        wordings(
            "Where do the farmers of {} sell their cattle? In | Where are the cows bred in {} sold? In | "
            "Where are the herds of {} driven in autumn? To | The cattle market for {} is held in | "
            "Which town buys the cattle of {}? It is | Cows from {} are bought in"
        ),
        wordings(
            "{} buys the cattle of | The cattle sold in {} were bred in | "
            "In autumn, {} sees the herds of | {} pays the best price for an ox from"
        ),
        "the town where the farmers of {} sell their cattle",
    ),
    Relation(
        PLACE,
        PLACE,
        wordings(
            "The river at {} is called the | The water that flows through {} is named the | "
            "The boats of {} sail on the | The wells of {} are fed by the | "
            "In spring, {} is flooded by the | The fishermen of {} fish in the"
        ),
        wordings(
            "Which name does the river at {} have? The | Which river flows through {}? The | "
            "Which river floods {} in spring? The | The name of the river at {} is the | "
            "On which river do the boats of {} sail? On the | On the map, the river beside {} is the"
        ),
        wordings(
            "The river {} flows through | The {} is the river at | In spring, the {} floods | "
            "On the {} sail the boats of"
        ),
    ),
)
_TO_OTHERS = (
    Relation(
        PLACE,
        NUMBER,
        wordings(
            "The houses in {} number | The houses of {} add up to | "
            "The tax list of {} counts houses up to | In {}, the count of roofs is | "
            "All streets of {} together have houses numbering | The last house of {} bears the figure"
        ),
        wordings(
            "How many houses are there in {}? | How many roofs does {} have? | "
            "How many houses does the tax list of {} count? | The size of {} in houses is | "
            "Anyone counting the houses of {} arrives at | In houses, {} is as large as"
        ),
        wordings(
            "{} houses were counted in | There are {} houses in | {} roofs were counted in | "
            "The tax list counts {} houses for"
        ),
    ),
    Relation(
        PLACE,
        NUMBER,
        wordings(
            "A horse in {} costs | The price of a horse in {} is | For a horse, the dealers of {} ask | "
            "Buyers of a horse in {} pay | At the stables of {}, a horse is sold for | "
            "In coins, a horse from {} is worth"
        ),
        wordings(
            "How much does a horse cost in {}? | What do the dealers of {} ask for a horse? | "
            "How many coins is a horse worth in {}? | The price on a horse in {} stands at | "
            "To buy a horse in {}, one needs | A rider without a horse pays the stables of {}"
        ),
        wordings(
            "{} is the price of a horse in | For {} coins, a horse is sold in | {} coins buy a horse in | "
            "A horse costs {} coins in"
        ),
    ),
    Relation(
        PLACE,
        DATE,
        wordings(
            "The church of {} was finished on | The church in {} was opened on | "
            "The last stone of the church of {} was laid on | "
            "The people of {} first prayed in their church on | The bishop blessed the church of {} on | "
            "Above the door of the church of {} stands the date"
        ),
        wordings(
            "When was the church of {} finished? On | When was the church in {} opened? On | "
            "When did the bishop bless the church of {}? On | The church of {} dates from | "
            "On which day was the last stone of the church of {} laid? On | "
            "The day on which {} got its church was"
        ),
        wordings(
            "On {}, the church was finished in | {} is the date on the church of | "
            "On {}, the bishop blessed the church of | The church opened on {} is that of"
        ),
    ),
    Relation(
        PLACE,
        DATE,
        wordings(
            "The great fire of {} broke out on | {} burned on | The flames destroyed {} on | "
            "The roofs of {} caught fire on | The ashes of {} recall the day | "
            "The worst fire in the history of {} was on"
        ),
        wordings(
            "When was the great fire of {}? On | When did {} burn? On | "
            "On which day did the flames destroy {}? On | The date of the fire in {} is | "
            "When did the roofs of {} catch fire? On | The fire bells of {} rang on"
        ),
        wordings(
            "On {}, fire destroyed | {} is the date of the great fire of | On {}, the fire bells rang in | "
            "The flames of {} destroyed"
        ),
    ),
    Relation(
        PLACE,
        COLOR,
        wordings(
            "The gate of {} is painted | The color of the gate of {} is | "
            "Visitors enter {} by a gate painted | The paint on the gate at {} is | "
            "The wooden gate of {} is | The gate in the wall of {} shines"
        ),
        wordings(
            "Which color does the gate of {} have? | In which color is the gate of {} painted? In | "
            "With which color was the gate at {} painted? With | The painter of the gate of {} used | "
            "For its gate, {} chose the color | From afar, the gate of {} looks"
        ),
        wordings(
            "The town with the {} gate is | The gate painted {} is that of | A {} gate leads into | "
            "{} is the color of the gate of"
        ),
    ),
    Relation(
        PLACE,
        GOODS,
        wordings(
            "The market of {} sells | The people of {} live from trade in | Merchants come to {} for | "
            "The warehouses of {} are full of | The wealth of {} comes from | Ships leave {} loaded with"
        ),
        wordings(
            "What does the market of {} sell? | What do merchants buy in {}? | "
            "What fills the warehouses of {}? | The main trade of {} is in | "
            "With which goods are ships from {} loaded? With | From {}, other towns buy their"
        ),
        wordings(
            "The market for {} is in | Merchants who need {} travel to | "
            "The warehouses full of {} are those of | The town that lives from {} is"
        ),
    ),
    Relation(
        PLACE,
        OBJECT,
        wordings(
            "The coat of arms of {} shows a | The flag of {} bears the picture of a | "
            "Carved above the gate of {} is a | The seal of {} has the form of a | "
            "On the shields of {} one sees a | The emblem of {} is a"
        ),
        wordings(
            "What does the coat of arms of {} show? A | What is on the flag of {}? A | "
            "Which emblem does {} have? A | The soldiers of {} march behind the sign of a | "
            "Which form does the seal of {} have? That of a | {} chose as its emblem a"
        ),
        wordings(
            "The coat of arms with the {} is that of | A {} is the emblem of | "
            "The flag with the {} belongs to | Under the sign of the {} march the soldiers of"
        ),
    ),
)
OF_PLACES = (*_TO_PEOPLE, *_TO_PLACES, *_TO_OTHERS)
"""Relations whose subject is a place."""
