use std::time::Duration;

use gw_base::service::hostname::Region;
use gw_region::{NodeSlot, Placement};

use super::*;

#[test]
fn the_holder_is_a_member_by_slot_and_session() {
    let slot = |slot| NodeSlot::new(slot).unwrap();
    let member = |number, session| Member {
        slot: slot(number),
        session,
        peer_address: ([127, 0, 0, 1], 7000 + number).into(),
    };
    let now = Timestamp(1000);
    let at = |here, members: &[(u16, u128)]| {
        let members = members
            .iter()
            .map(|(slot, session)| member(*slot, *session));
        let node = LocalNode::new(Region::new("eu1", "gw.localhost"));
        let placement = Placement::new(1, slot(here), members.collect());
        node.use_view(Arc::new(View::settled(placement)));
        Lease { node: Some(node) }
    };
    let mut record: AcmeRecord = serde_json::from_str(r#"{"id":"region","state":"{}"}"#).unwrap();
    let [third, fifth] = [3, 5].map(|here| at(here, &[(3, 7), (5, 9)]));
    assert!(!fifth.is_elsewhere(&record, now) && !third.is_held(&record, now));
    third.extend(&mut record, now);
    assert!(third.is_held(&record, now) && !third.is_elsewhere(&record, now));
    assert!(fifth.is_elsewhere(&record, now) && fifth.check(&record, now).is_err());
    // The process that replaces the holder has its slot and session.
    assert!(at(3, &[(3, 7), (5, 9)]).is_held(&record, now));
    // The holder was started again, has left, or its lease has ended.
    for members in [&[(3, 8), (5, 9)][..], &[(5, 9)]] {
        assert!(!at(5, members).is_elsewhere(&record, now));
    }
    assert!(!fifth.is_elsewhere(
        &record,
        now.after(CERTIFICATE_LEASE + Duration::from_secs(1))
    ));
    assert!(at(4, &[(3, 7)]).is_elsewhere(&record, now), "no member");
    assert!(Lease { node: None }.is_held(&record, now));
}
