//! The faults: what happens, which requests may fail meanwhile, and how soon all is well again.

use std::time::Duration;

use clap::ValueEnum;

use super::NODES;
use super::acts::{Act, Part};
use super::site::TWINS;
use super::world::Machine;
use crate::callers::Failed;

/// A link that is cut and healed each second.
const FLAP_CUT: Duration = Duration::from_millis(400);
const FLAP_HEALED: Duration = Duration::from_millis(600);
/// A node that lags is cut off for so long, and then reachable for so long.
const LAG: Duration = Duration::from_secs(2);
const CAUGHT_UP: Duration = Duration::from_millis(500);
/// Sockets of a killed process close a moment after its end.
const MOMENT: Duration = Duration::from_millis(300);
/// Time in which a node that sends nothing is declared dead, and its services have moved.
const MOVED_WITHIN: Duration = Duration::from_secs(9);
/// A tunnel that was cut is noticed by its agent.
const WELL_WITHIN: Duration = Duration::from_secs(60);

/// A kind of fault. Node, agent and link are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Kind {
    /// No packet reaches a node or leaves it
    Lost,
    /// A node is frozen
    Frozen,
    /// A node is killed, and started
    Killed,
    /// A node is killed and started while PostgreSQL does not answer
    Crashed,
    /// A node leaves, and comes back
    Stopped,
    /// All nodes are replaced
    Replaced,
    /// A node does not reach PostgreSQL
    NoEngine,
    /// A node does not reach the others
    NoPeers,
    /// A node reaches neither
    Alone,
    /// A node reaches neither for two seconds at a time
    Lagging,
    /// Packets in one direction between two machines are lost
    OneWay,
    /// Links are cut again and again
    Flapping,
    /// PostgreSQL does not answer
    EngineFrozen,
    /// PostgreSQL is restarted
    EngineRestarted,
    /// PostgreSQL fails over, and a node is killed at the same moment
    FailOver,
    /// One of two agents is killed, and started
    AgentKilled,
    /// One of two agents is frozen
    AgentFrozen,
    /// All agents are restarted in turn
    AgentsRestarted,
    /// Nodes and agents go to the next release (with --next)
    Upgrade,
}

/// A fault of a part of the region.
pub(super) struct Fault {
    pub(super) name: String,
    pub(super) begin: Vec<Act>,
    /// Time between begin and end.
    pub(super) length: Duration,
    pub(super) end: Vec<Act>,
    pub(super) may_fail: MayFail,
    /// Time from the end until all is well again.
    pub(super) well_within: Duration,
    /// The node with the fault. Others are asked for changes.
    pub(super) victim: usize,
    /// Whether this node must issue access tokens meanwhile.
    pub(super) issues_tokens: bool,
}

/// Requests that may fail until all is well again.
#[derive(Default)]
pub(super) struct MayFail {
    /// Those of callers at this node, and of services whose only agent is connected to it.
    at: Option<usize>,
    /// Those whose way between caller, owner and agent passes one of these links.
    links: Vec<Link>,
    /// Others that were in flight until so long after the begin.
    pub(super) in_flight: Duration,
    /// Whether only POSTs may.
    only_posts: bool,
}

/// Packets in one direction.
type Link = (Machine, Machine);

/// Numbers that depend on the seed only.
pub(super) struct Dice(pub(super) u64);

impl Dice {
    /// A number below `end`, by splitmix64.
    pub(super) fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        let mixed = mixed ^ mixed >> 31;
        usize::try_from(mixed % end as u64).unwrap_or_default()
    }

    pub(super) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

impl MayFail {
    /// Whether a request of a pair may fail, of the fault that took effect between `from` and `to`.
    pub(super) fn allows(
        &self,
        way: Way,
        failed: &Failed,
        [from, to]: [std::time::Instant; 2],
    ) -> bool {
        let was_in_flight = !self.in_flight.is_zero() && failed.began <= to + self.in_flight;
        let may = self.concerns(way) || was_in_flight;
        may && failed.ended >= from && (failed.is_post || !self.only_posts)
    }

    /// Whether requests on this way pass a node or a link with the fault.
    pub(super) fn concerns(&self, way: Way) -> bool {
        let is_at = |node: usize| [Some(way.node), way.entry].contains(&Some(node));
        self.at.is_some_and(is_at) || self.links.iter().any(|link| way.passes(*link))
    }
}

/// Where requests of a caller pass.
#[derive(Clone, Copy)]
pub(super) struct Way {
    /// The node of the caller.
    pub(super) node: usize,
    /// The node that owns the service.
    pub(super) owner: Option<usize>,
    /// The node to which the agent is connected; `None` for any.
    pub(super) entry: Option<usize>,
}

impl Way {
    fn passes(self, (from, to): Link) -> bool {
        let is_end = |node: usize| [from, to].contains(&Machine::Node(node));
        let is_of = |node: Option<usize>| node.is_some_and(is_end);
        if [from, to].iter().any(|it| matches!(it, Machine::Engine(_))) {
            return is_end(self.node) || is_of(self.owner) || is_of(self.entry);
        }
        // An agent of any node can be connected to the other end.
        let joins = |one: usize| Some(one) != self.owner && is_end(one) && is_of(self.owner);
        joins(self.node) || self.entry.map_or_else(|| is_of(self.owner), joins)
    }
}

impl Kind {
    /// Draws the victims of a fault of this kind.
    pub(super) fn draw(self, dice: &mut Dice, length: Duration) -> Fault {
        let node = dice.below(NODES);
        let [victim, engine] = [Part::Node(node), Part::Engine];
        let agent = Part::Agent(TWINS[dice.below(TWINS.len())]);
        let link = links()[dice.below(links().len())];
        let fault = Fault::new(format!("{self:?}"), length);
        match self {
            Self::Lost => fault
                .acts(
                    [Act::Unplug(Machine::Node(node))],
                    [Act::PlugIn(Machine::Node(node))],
                )
                .at(node, MOVED_WITHIN),
            Self::Frozen => fault
                .acts([Act::Freeze(victim)], [Act::Continue(victim)])
                .at(node, MOVED_WITHIN),
            Self::Killed => fault
                .acts([Act::Kill(victim)], [Act::Start(victim)])
                .at(node, MOMENT),
            Self::Crashed => fault
                .acts(
                    [Act::Freeze(engine), Act::Kill(victim), Act::Start(victim)],
                    [Act::Continue(engine)],
                )
                .at(node, MOMENT),
            Self::Stopped => fault
                .acts([Act::Stop(victim)], [Act::Start(victim)])
                .at(node, Duration::ZERO),
            Self::Replaced => fault.acts((0..NODES).map(Act::Replace), []),
            Self::NoEngine => fault.cut(to_engines(node)).without_contact(node),
            Self::NoPeers => fault.cut(to_peers(node)).without_contact(node),
            Self::Alone => fault.cut(to_all(node)).without_contact(node),
            Self::Lagging => fault.lagging(to_all(node), node),
            Self::OneWay => fault.cut(vec![link]).between(link),
            Self::Flapping => fault.flapping(dice),
            Self::EngineFrozen => fault.acts([Act::Freeze(engine)], [Act::Continue(engine)]),
            Self::EngineRestarted => fault.acts([Act::Stop(engine), Act::Start(engine)], []),
            Self::FailOver => fault
                .acts(
                    [Act::Kill(victim), Act::FailOver],
                    [Act::Start(victim), Act::Follow],
                )
                .at(node, MOMENT),
            Self::AgentKilled => fault
                .acts([Act::Kill(agent)], [Act::Start(agent)])
                .posts_in_flight(),
            Self::AgentFrozen => fault.acts([Act::Freeze(agent)], [Act::Continue(agent)]),
            Self::AgentsRestarted => {
                let agents = (0..=TWINS[1]).map(Part::Agent);
                fault.acts(agents.flat_map(|it| [Act::Stop(it), Act::Start(it)]), [])
            }
            Self::Upgrade => fault.acts([Act::Upgrade], []),
        }
    }
}

impl Fault {
    fn new(name: String, length: Duration) -> Self {
        Self {
            name,
            begin: Vec::new(),
            length,
            end: Vec::new(),
            may_fail: MayFail::default(),
            well_within: WELL_WITHIN,
            victim: 0,
            issues_tokens: false,
        }
    }

    /// How long it lasts, without the time that its steps take.
    pub(super) fn lasts(&self) -> Duration {
        let waits = self.begin.iter().filter_map(|act| match act {
            Act::Wait(length) => Some(*length),
            _ => None,
        });
        self.length + waits.sum::<Duration>()
    }

    fn acts(
        mut self,
        begin: impl IntoIterator<Item = Act>,
        end: impl IntoIterator<Item = Act>,
    ) -> Self {
        self.begin.extend(begin);
        self.end.extend(end);
        self
    }

    /// Requests at the node may fail, and others that began until so long after the begin.
    fn at(self, node: usize, in_flight: Duration) -> Self {
        Self {
            name: format!("{} node {node}", self.name),
            may_fail: MayFail {
                at: Some(node),
                in_flight,
                ..MayFail::default()
            },
            victim: node,
            ..self
        }
    }

    fn cut(self, links: Vec<Link>) -> Self {
        let [cut, heal] = [Act::Cut, Act::Heal].map(|act| each(act, &links));
        let fault = self.acts(cut, heal);
        Self {
            may_fail: MayFail {
                links,
                ..MayFail::default()
            },
            issues_tokens: true,
            ..fault
        }
    }

    /// The node is declared dead, or keeps its place and its services.
    fn without_contact(mut self, node: usize) -> Self {
        self.may_fail.in_flight = MOVED_WITHIN;
        Self {
            name: format!("{} node {node}", self.name),
            victim: node,
            ..self
        }
    }

    fn between(self, (from, to): Link) -> Self {
        let nodes = (0..NODES).map(Machine::Node);
        let victim = nodes.clone().position(|node| [from, to].contains(&node));
        Self {
            name: format!("{} from {from:?} to {to:?}", self.name),
            victim: victim.unwrap_or_default(),
            ..self
        }
    }

    fn posts_in_flight(mut self) -> Self {
        self.may_fail.in_flight = MOMENT;
        self.may_fail.only_posts = true;
        self
    }

    /// The node is never cut off for long enough to be declared dead.
    fn lagging(self, links: Vec<Link>, node: usize) -> Self {
        let [cut, heal] = [Act::Cut, Act::Heal].map(|act| each(act, &links));
        let turn = [cut, vec![Act::Wait(LAG)], heal, vec![Act::Wait(CAUGHT_UP)]].concat();
        let turns = self.length.div_duration_f64(LAG + CAUGHT_UP).ceil() as usize;
        let fault = self.acts(turn.repeat(turns), []);
        Self {
            name: format!("{} node {node}", fault.name),
            length: Duration::ZERO,
            may_fail: MayFail {
                links,
                ..MayFail::default()
            },
            victim: node,
            ..fault
        }
    }

    fn flapping(self, dice: &mut Dice) -> Self {
        let mut links = links();
        dice.shuffle(&mut links);
        let turn = |(from, to): Link| {
            let healed = [Act::Heal(from, to), Act::Wait(FLAP_HEALED)];
            [[Act::Cut(from, to), Act::Wait(FLAP_CUT)], healed].concat()
        };
        let turns = self.length.div_duration_f64(FLAP_CUT + FLAP_HEALED).ceil() as usize;
        let fault = self.acts(links.into_iter().cycle().take(turns).flat_map(turn), []);
        Self {
            length: Duration::ZERO,
            ..fault
        }
    }
}

fn each(act: fn(Machine, Machine) -> Act, links: &[Link]) -> Vec<Act> {
    links.iter().map(|(from, to)| act(*from, *to)).collect()
}

/// Both directions between two machines.
fn both(one: Machine, other: Machine) -> [Link; 2] {
    [(one, other), (other, one)]
}

fn to_engines(node: usize) -> Vec<Link> {
    [0, 1]
        .map(|engine| both(Machine::Node(node), Machine::Engine(engine)))
        .concat()
}

fn to_peers(node: usize) -> Vec<Link> {
    let others = (0..NODES).filter(|other| *other != node);
    others
        .flat_map(|other| both(Machine::Node(node), Machine::Node(other)))
        .collect()
}

fn to_all(node: usize) -> Vec<Link> {
    [to_engines(node), to_peers(node)].concat()
}

/// Each direction between two nodes, and between a node and an engine.
fn links() -> Vec<Link> {
    let of_node = |node: usize| {
        let to_later = (node + 1..NODES).map(Machine::Node);
        to_later
            .chain([Machine::Engine(0)])
            .flat_map(move |other| both(Machine::Node(node), other))
    };
    (0..NODES).flat_map(of_node).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_concerns_requests_and_tunnels_that_pass_it() {
        let way = |node, owner, entry| Way {
            node,
            owner: Some(owner),
            entry: Some(entry),
        };
        let nodes = (Machine::Node(0), Machine::Node(1));
        assert!(way(0, 1, 1).passes(nodes) && way(1, 0, 0).passes(nodes));
        // The tunnel of a service that is called at a third node.
        assert!(way(2, 1, 0).passes(nodes));
        assert!(!way(0, 0, 0).passes(nodes) && !way(0, 2, 2).passes(nodes));
        let engine = (Machine::Engine(0), Machine::Node(1));
        assert!(way(1, 0, 0).passes(engine) && !way(2, 0, 0).passes(engine));
    }

    #[test]
    fn a_seed_gives_one_order() {
        let drawn = |seed| {
            let mut order: Vec<usize> = (0..20).collect();
            Dice(seed).shuffle(&mut order);
            order
        };
        assert_eq!(drawn(1), drawn(1));
        assert_ne!(drawn(1), drawn(2));
        let mut sorted = drawn(3);
        sorted.sort_unstable();
        assert_eq!(sorted, (0..20).collect::<Vec<_>>());
    }

    #[test]
    fn every_link_is_there_once() {
        let links = links();
        assert_eq!(links.len(), NODES * (NODES - 1) + 2 * NODES);
        let is_repeated = |at: usize| links[..at].contains(&links[at]);
        assert!(!(0..links.len()).any(is_repeated));
    }
}
