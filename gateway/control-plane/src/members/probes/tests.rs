use gw_base::tls::pki::NodeIdentity;
use gw_region::NodeRow;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

/// Probes of node 0, with time since their beginning.
struct World {
    probes: Probes,
    start: Instant,
    roster: Roster,
}

impl World {
    /// A region of nodes with these sessions, in the slots from 0. Node 0 looks.
    fn of(sessions: &[u128]) -> Self {
        let rows = (0..)
            .zip(sessions)
            .map(|(slot, session)| row(slot, *session, NodeState::Live))
            .collect();
        let mut world = Self {
            probes: Probes::default(),
            start: Instant::now(),
            roster: Roster { epoch: 1, rows },
        };
        world.look(Duration::ZERO, &[]);
        world
    }

    /// Looks with the sessions that give no sign of life.
    fn look(&mut self, after: Duration, suspects: &[u128]) {
        let suspects: Vec<Member> = suspects
            .iter()
            .filter_map(|session| self.roster.session(*session))
            .map(NodeRow::member)
            .collect();
        self.probes.look(
            self.start + after,
            &self.roster,
            NodeSlot::new(0),
            &suspects,
        );
    }

    fn begin(&mut self, after: Duration) -> Vec<u128> {
        self.probes
            .begin(self.start + after)
            .into_iter()
            .map(|member| member.session)
            .collect()
    }

    /// Sessions whose connections end now.
    fn lost(&mut self, after: Duration) -> Vec<u128> {
        self.probes
            .lost(self.start + after)
            .into_iter()
            .map(|(lost, _)| lost.session)
            .collect()
    }

    fn set(&mut self, slot: usize, session: u128, state: NodeState) {
        self.roster.rows[slot] = row(slot as u16, session, state);
    }
}

fn row(slot: u16, session: u128, state: NodeState) -> NodeRow {
    NodeRow {
        slot: NodeSlot::new(slot).unwrap(),
        session,
        state,
        beat: 1,
        acknowledged: 1,
        peer_address: ([127, 0, 0, 1], 7000 + slot).into(),
        version: "1".into(),
        applied_revision: 1,
        tag: [0; 16],
    }
}

#[test]
fn silence_while_this_process_did_not_run_is_no_verdict() {
    let mut world = World::of(&[10, 20]);
    world.look(3 * SECOND, &[20]);
    assert_eq!(world.begin(3 * SECOND), [20]);
    world.set(1, 20, NodeState::Dead);
    world.look(5 * SECOND, &[]);
    world
        .probes
        .ended(world.start + 6 * SECOND, 20, Some(ProbeVerdict::Silent));
    assert_eq!(world.lost(6 * SECOND), []);
    assert_eq!(world.begin(6 * SECOND), [20]);
    world
        .probes
        .ended(world.start + 8 * SECOND, 20, Some(ProbeVerdict::Silent));
    assert_eq!(world.lost(8 * SECOND), [20]);
}

#[test]
fn only_a_suspect_is_probed_and_by_one_connection_at_a_time() {
    let mut world = World::of(&[10, 20, 30]);
    assert_eq!(
        (world.begin(SECOND), world.probes.watched.is_empty()),
        (vec![], true)
    );
    world.look(3 * SECOND, &[20]);
    assert_eq!(world.begin(3 * SECOND), [20]);
    assert_eq!(world.begin(4 * SECOND), []);
    world
        .probes
        .ended(world.start, 20, Some(ProbeVerdict::Silent));
    assert_eq!(
        world.begin(5 * SECOND),
        [20],
        "a second after the beginning of the last one, at the earliest"
    );
    world
        .probes
        .ended(world.start, 20, Some(ProbeVerdict::Answers));
    assert_eq!(
        (world.begin(5 * SECOND), world.begin(6 * SECOND)),
        (vec![], vec![20])
    );
    // It lives. The probe under way keeps its place until it ends.
    world.look(7 * SECOND, &[]);
    world
        .probes
        .ended(world.start, 20, Some(ProbeVerdict::Silent));
    assert_eq!(
        (world.begin(9 * SECOND), world.lost(9 * SECOND)),
        (vec![], vec![])
    );
}

#[test]
fn connections_with_a_silent_node_end_once_it_is_declared_dead() {
    let mut world = World::of(&[10, 20, 30]);
    world.look(3 * SECOND, &[20]);
    world.begin(3 * SECOND);
    world
        .probes
        .ended(world.start, 20, Some(ProbeVerdict::Silent));
    assert_eq!(world.lost(5 * SECOND), [], "not declared dead");
    world.set(1, 20, NodeState::Dead);
    world.look(6 * SECOND, &[]);
    assert_eq!(
        (world.lost(6 * SECOND), world.lost(6 * SECOND)),
        (vec![20], vec![])
    );
    // Again after each probe: a connection may have been opened meanwhile.
    assert_eq!(world.begin(6 * SECOND), [20]);
    world
        .probes
        .ended(world.start, 20, Some(ProbeVerdict::Silent));
    assert_eq!(world.lost(8 * SECOND), [20]);
    world.look(6 * SECOND + WATCHED, &[]);
    assert_eq!(
        (world.begin(60 * SECOND), world.probes.watched.is_empty()),
        (vec![], true)
    );
}

#[test]
fn a_dead_node_that_answers_keeps_its_connections_until_it_is_silent() {
    let mut world = World::of(&[10, 20, 30]);
    world.look(3 * SECOND, &[20]);
    world.begin(3 * SECOND);
    world
        .probes
        .ended(world.start, 20, Some(ProbeVerdict::Answers));
    world.set(1, 20, NodeState::Dead);
    world.look(6 * SECOND, &[]);
    assert_eq!(
        (world.lost(6 * SECOND), world.begin(6 * SECOND)),
        (vec![], vec![20])
    );
    // A probe that this node cannot make says nothing.
    world.probes.ended(world.start, 20, None);
    assert_eq!(
        (world.lost(7 * SECOND), world.begin(7 * SECOND)),
        (vec![], vec![20])
    );
    world
        .probes
        .ended(world.start, 20, Some(ProbeVerdict::Silent));
    assert_eq!(world.lost(9 * SECOND), [20]);
}

#[test]
fn a_node_that_was_dead_before_is_not_probed() {
    let mut world = World::of(&[10, 20]);
    world.set(1, 20, NodeState::Dead);
    let roster = world.roster.clone();
    let mut later = World {
        roster,
        ..World::of(&[10])
    };
    later.look(SECOND, &[]);
    later.look(2 * SECOND, &[]);
    assert_eq!(later.begin(2 * SECOND), []);
}

#[test]
fn the_session_of_a_process_that_was_replaced_is_probed_but_not_that_of_one_that_joined_again() {
    let mut world = World::of(&[10, 20, 30, 40]);
    world.set(1, 21, NodeState::Joining);
    world.set(2, 7, NodeState::Joining);
    world.set(3, 40, NodeState::Left);
    world.look(SECOND, &[]);
    assert_eq!(world.begin(SECOND), [30]);
    world.set(3, 8, NodeState::Joining);
    world
        .probes
        .ended(world.start, 30, Some(ProbeVerdict::Silent));
    world.look(3 * SECOND, &[]);
    let lost = world.probes.lost(world.start + 3 * SECOND);
    // Tunnels through the slot since then come through the next process.
    let until = world.start + SECOND;
    assert_eq!(
        lost,
        [(
            LostNode {
                slot: NodeSlot::new(2).unwrap(),
                session: 30,
                until
            },
            true
        )]
    );
    assert_eq!(
        world.begin(3 * SECOND),
        [30],
        "a process that has left is not probed"
    );
}

#[test]
fn a_dead_node_that_joins_again_is_released() {
    let mut world = World::of(&[10, 20]);
    world.set(1, 20, NodeState::Dead);
    world.look(SECOND, &[]);
    assert_eq!(world.begin(SECOND), [20]);
    world.set(1, 21, NodeState::Joining);
    world.look(2 * SECOND, &[]);
    world
        .probes
        .ended(world.start, 20, Some(ProbeVerdict::Silent));
    assert_eq!(
        (world.lost(3 * SECOND), world.begin(4 * SECOND)),
        (vec![], vec![])
    );
}

#[test]
fn probes_at_once_are_bounded_and_rarer_in_a_large_region() {
    let sessions: Vec<u128> = (0..1024).map(|number| number << 64).collect();
    let mut world = World::of(&sessions);
    world.look(3 * SECOND, &sessions[1..=limits::PROBES + 5]);
    assert_eq!(world.begin(3 * SECOND).len(), limits::PROBES);
    for session in &sessions[1..=limits::PROBES] {
        world
            .probes
            .ended(world.start, *session, Some(ProbeVerdict::Answers));
    }
    assert_eq!(world.begin(4 * SECOND).len(), 5);
    assert_eq!(
        world.begin(13 * SECOND),
        [],
        "each of 1,024 nodes probes every 10.24 s"
    );
    assert_eq!(world.begin(14 * SECOND).len(), limits::PROBES - 5);
}

#[test]
fn any_sign_of_the_process_is_an_answer() {
    let to = row(1, 20, NodeState::Dead).member();
    let other = |slot: u16, session| {
        Some(NodeIdentity {
            slot: NodeSlot::new(slot).unwrap(),
            session,
        })
    };
    let io = |kind: io::ErrorKind| NodeCallError::Io(kind.into());
    for (error, expected) in [
        (NodeCallError::NoCertificate, None),
        (NodeCallError::TimedOut, Some(ProbeVerdict::Silent)),
        (NodeCallError::Refused, Some(ProbeVerdict::Silent)),
        (io(io::ErrorKind::TimedOut), Some(ProbeVerdict::Silent)),
        (
            io(io::ErrorKind::ConnectionReset),
            Some(ProbeVerdict::Answers),
        ),
        (
            io(io::ErrorKind::UnexpectedEof),
            Some(ProbeVerdict::Answers),
        ),
        (
            NodeCallError::OtherProcess(other(1, 21)),
            Some(ProbeVerdict::Answers),
        ),
        (
            NodeCallError::OtherProcess(other(1, 19)),
            Some(ProbeVerdict::Silent),
        ),
        (
            NodeCallError::OtherProcess(other(2, 21)),
            Some(ProbeVerdict::Silent),
        ),
        (
            NodeCallError::OtherProcess(None),
            Some(ProbeVerdict::Silent),
        ),
    ] {
        assert_eq!(verdict(&to, Some(&error)), expected, "{error:?}");
    }
    assert_eq!(verdict(&to, None), Some(ProbeVerdict::Answers));
}
