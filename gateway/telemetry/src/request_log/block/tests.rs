use std::fmt::Write;

use gw_shared::id::{AgentId, ClientId, KeyId};
use http::Method;
use proptest::prelude::*;

use super::super::record::{RecordedAttempt, RequestView};
use super::*;

const PROTOCOLS: [Protocol; 4] = [
    Protocol::Http10,
    Protocol::Http11,
    Protocol::Http2,
    Protocol::Replay,
];
const SECOND_MS: u64 = 1_795_234_532_000;

fn records() -> impl Strategy<Value = Vec<RequestRecord>> {
    let clients: [ClientId; 20] = std::array::from_fn(|_| ClientId::random());
    let keys: [KeyId; 20] = std::array::from_fn(|_| KeyId::random());
    let agents: [AgentId; 20] = std::array::from_fn(|_| AgentId::random());
    let what = (
        any::<[u8; 16]>(),
        0..1000u64,
        "/[a-z?é]{0,40}",
        any::<IpAddr>(),
        0..20usize,
        0..4u8,
    );
    let numbers = (
        any::<Option<u16>>(),
        any::<u64>(),
        any::<[Option<u32>; 4]>(),
        any::<Option<[u8; 16]>>(),
    );
    let record = (what, numbers).prop_map(
        move |((random, ms, target, caller, which, kind), (status, n, us, trace_id))| {
            let mut id = *RequestId::first_of_ms(SECOND_MS + ms).as_bytes();
            id[9..].copy_from_slice(&random[9..]);
            let id = RequestId::from_bytes(id).unwrap();
            RequestRecord {
                id,
                method: if kind == 0 {
                    Method::GET
                } else {
                    Method::from_bytes(b"ODD").unwrap()
                },
                target: target.into(),
                caller,
                protocol: PROTOCOLS[usize::from(kind)],
                at_apex: false,
                by: match kind {
                    0 => None,
                    1 => Some(CallerId::Client(clients[which].clone())),
                    2 => Some(CallerId::ServiceKey(keys[which].clone())),
                    _ => Some(CallerId::Admin),
                },
                status,
                code: us[0].map(|_| "GW_TUNNEL_LOST"),
                ended: [Ended::Complete, Ended::Cut, Ended::CallerGone][which % 3],
                bytes_in: n,
                bytes_taken: us[3].map(|_| n / 3),
                bytes_out: n >> which,
                timing: Timing {
                    authenticate: which as u32,
                    wait: us[0],
                    agent: us[1],
                    backend_first_byte: us[2],
                    response_head: us[3],
                    total: n >> 1,
                },
                agent: us[1].map(|_| agents[which].clone()),
                attempts: (0..which % 4)
                    .map(|number| attempt(&agents[(which + number) % 20], number as u32))
                    .collect(),
                replayed_from: us[2].map(|_| id),
                trace_id,
                capture: None,
            }
        },
    );
    prop::collection::vec(record, 1..60)
}

fn attempt(agent: &AgentId, duration_us: u32) -> RecordedAttempt {
    let agent_id = (!duration_us.is_multiple_of(3)).then(|| agent.clone());
    RecordedAttempt {
        agent_id,
        reason: ["no_slot", "silent"][duration_us as usize % 2],
        duration_us,
    }
}

/// Fields of `record` as a view has them.
fn expected(record: &RequestRecord) -> [Option<String>; 10] {
    let (by, caller) = match &record.by {
        None => (None, None),
        Some(CallerId::Client(id)) => (Some("jwt"), Some(id.to_string())),
        Some(CallerId::ServiceKey(id)) => (Some("service_key"), Some(id.to_string())),
        Some(CallerId::Admin) => (Some("admin"), None),
    };
    let timing = record.timing;
    let mut numbers = format!(
        "{:?} {} {:?} {}",
        record.status, record.bytes_in, record.bytes_taken, record.bytes_out
    );
    let durations = (
        timing.authenticate,
        timing.wait,
        timing.agent,
        timing.backend_first_byte,
        timing.response_head,
    );
    write!(numbers, " {durations:?} {} {}", timing.total, record.caller).unwrap();
    [
        Some(record.id.to_string()),
        Some(record.method.to_string()),
        Some(record.target.to_string()),
        by.map(str::to_owned),
        caller,
        record.code.map(str::to_owned),
        record.agent.as_ref().map(ToString::to_string),
        record.replayed_from.map(|id| id.to_string()),
        Some(serde_json::to_string(&record.columns("", "").attempts).unwrap()),
        Some(numbers),
    ]
}

fn found(view: RequestView) -> [Option<String>; 10] {
    let durations = view.durations_us;
    let mut numbers = format!(
        "{:?} {} {:?} {}",
        view.status, view.bytes_in, view.bytes_taken, view.bytes_out
    );
    let some = (
        durations.authenticate,
        durations.wait,
        durations.agent,
        durations.backend_first_byte,
        durations.response_head,
    );
    write!(
        numbers,
        " {some:?} {} {}",
        durations.total, view.caller_address
    )
    .unwrap();
    let target = view
        .query
        .map_or(view.path.clone(), |query| format!("{}?{query}", view.path));
    [
        Some(view.id),
        Some(view.method),
        Some(target),
        view.auth_mode,
        view.caller_id,
        view.code,
        view.agent_id,
        view.replayed_from,
        Some(serde_json::to_string(&view.attempts).unwrap()),
        Some(numbers),
    ]
}

proptest! {
    #[test]
    fn encoded_blocks_decode_to_the_same_records(
        records in records(),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut encoder = Encoder::new().unwrap();
        let mut builder = encoder.begin(SECOND_MS);
        for (number, record) in records.iter().enumerate() {
            builder
                .add(
                    (number / 7) as i64,
                    record,
                    (number % 2 == 0).then_some(number as i64),
                    &Masker::default(),
                )
                .unwrap();
        }
        let (data, zone_map) = builder.finish().unwrap();
        let mut unpacker = Unpacker::new().unwrap();
        let raw = unpacker.unpack(data).unwrap();
        let block = DecodedBlock::read(&raw, |_| true).unwrap();
        prop_assert_eq!(block.rows.len(), records.len());
        for (number, ((service, row), record)) in block.rows.iter().zip(&records).enumerate() {
            prop_assert_eq!(found(block.columns(row, "acme--api").view()), expected(record));
            prop_assert_eq!(*service, (number / 7) as i64);
            prop_assert_eq!(row.capture, (number % 2 == 0).then_some(number as i64));
        }
        let is_retried = records.iter().any(|record| !record.attempts.is_empty());
        prop_assert_eq!(zone_map.bits & ZoneMap::ATTEMPTS != 0, is_retried);
        prop_assert_eq!(
            zone_map.longest_us,
            records.iter().map(|record| record.timing.total).max().unwrap()
        );
        let some = DecodedBlock::read(&raw, |service| service == 1).unwrap();
        let ids = |block: &DecodedBlock<'_>, from: usize, to: usize| -> Vec<[u8; 16]> {
            block.rows.iter().take(to).skip(from).map(|(_, row)| block.id(row)).collect()
        };
        prop_assert_eq!(ids(&some, 0, records.len()), ids(&block, 7, 14));
        // A truncated block is refused.
        let cut = cut.index(data.len());
        prop_assert!(
            unpacker
                .unpack(&data[..cut])
                .and_then(|raw| DecodedBlock::read(&raw, |_| true).map(drop))
                .is_err()
        );
    }

    #[test]
    fn arbitrary_bytes_decode_without_a_panic(
        data in prop::collection::vec(any::<u8>(), 0..300),
        version in 0..8u8,
    ) {
        let data: Vec<u8> = std::iter::once(version).chain(data).collect();
        if let Ok(raw) = Unpacker::new().unwrap().unpack(&data)
            && let Ok(block) = DecodedBlock::read(&raw, |_| true)
        {
            for (_, row) in &block.rows {
                block.columns(row, "acme--api").view();
            }
        }
    }
}

/// Block of version 1, before the bytes that the backend took.
const FIRST: &str = "\
    01f0f9ff9faa330206015308012a03034745541a67775f63695f3030303030303030303030303030\
    3030303030301047575f4241434b454e445f524553455497067001800203040506070100042f612f\
    6200cb00710702010101f60301020105ac020a0114011e01280132d8040001019aa4000007700180\
    020304050607090130313233343536373839616263646566010e9706700180020304050607020004\
    2f612f6200cb007107020001c8010000000000000000000000000000";
/// Block of version 3, before the failed attempts.
const WITH_BYTES_TAKEN: &str = "\
    03f0f9ff9faa330206015508012b03034745541a67775f63695f3030303030303030303030303030\
    3030303030301047575f4241434b454e445f524553455497067001800203040506070100042f612f\
    6200cb00710702010101f60301020105ac020a0114011e01280132d8040001019aa4000007700180\
    020304050607090130313233343536373839616263646566010e0104970670018002030405060702\
    00042f612f6200cb007107020001c801000000000000000000000000000000";
/// The same records in a block as it is written now.
const BLOCK: &str = "\
    05f0f9ff9faa330206015a08012c05034745541a67775f63695f3030303030303030303030303030\
    3030303030301047575f4241434b454e445f52455345541761675f30303030303030303030303030\
    30303030303030076e6f5f736c6f7497067001800203040506070100042f612f6200cb0071070201\
    0101f60301020105ac020a0114011e01280132d8040001019aa40000077001800203040506070901\
    30313233343536373839616263646566010e0104010304ac0297067001800203040506070200042f\
    612f6200cb007107020001c80100000000000000000000000000000000";

#[test]
fn a_plain_block_keeps_its_bytes() {
    let id = |low: u8| {
        RequestId::from_bytes([1, 0x9a, 0xa4, 0, 0, 7, 0x70, 1, 0x80, 2, 3, 4, 5, 6, 7, low])
            .unwrap()
    };
    let full = RequestRecord {
        by: Some(CallerId::Client(
            ClientId::new("gw_ci_00000000000000000000").unwrap(),
        )),
        status: Some(502),
        code: Some("GW_BACKEND_RESET"),
        ended: Ended::Cut,
        bytes_in: 5,
        bytes_taken: Some(4),
        bytes_out: 300,
        timing: Timing {
            authenticate: 10,
            wait: Some(20),
            agent: Some(30),
            backend_first_byte: Some(40),
            response_head: Some(50),
            total: 600,
        },
        attempts: Box::new([RecordedAttempt {
            agent_id: Some(AgentId::new("ag_00000000000000000000").unwrap()),
            reason: "no_slot",
            duration_us: 300,
        }]),
        replayed_from: Some(id(9)),
        trace_id: Some(*b"0123456789abcdef"),
        ..RequestRecord::example(id(1))
    };
    let plain = RequestRecord::example(id(2));
    let mut encoder = Encoder::new().unwrap();
    let mut builder = encoder.begin(full.id.unix_ms() / SLOT_MS * SLOT_MS);
    builder.add(3, &full, Some(7), &Masker::default()).unwrap();
    builder.add(4, &plain, None, &Masker::default()).unwrap();
    let (block, _) = builder.finish().unwrap();
    let text = block
        .iter()
        .fold(String::new(), |text, byte| text + &format!("{byte:02x}"));
    assert_eq!(text, BLOCK);
    for (earlier, has_bytes_taken) in [(FIRST, false), (WITH_BYTES_TAKEN, true)] {
        let earlier: Vec<u8> = (0..earlier.len() / 2)
            .map(|at| u8::from_str_radix(&earlier[2 * at..][..2], 16).unwrap())
            .collect();
        let without = |record: &RequestRecord| {
            let bytes_taken = record.bytes_taken.filter(|_| has_bytes_taken);
            expected(&RequestRecord {
                bytes_taken,
                attempts: Box::default(),
                ..record.clone()
            })
        };
        let raw = Unpacker::new().unwrap().unpack(&earlier).unwrap();
        let block = DecodedBlock::read(&raw, |_| true).unwrap();
        let views = block
            .rows
            .iter()
            .map(|(_, row)| found(block.columns(row, "acme--api").view()));
        assert_eq!(views.collect::<Vec<_>>(), [without(&full), without(&plain)]);
    }
}

#[test]
fn more_attempts_than_a_record_keeps_are_left_out() {
    let attempts: Vec<_> = (0..5)
        .map(|number| attempt(&AgentId::random(), number))
        .collect();
    let id = RequestId::first_of_ms(SECOND_MS);
    let record = RequestRecord {
        attempts: attempts.clone().into(),
        ..RequestRecord::example(id)
    };
    let mut encoder = Encoder::new().unwrap();
    let mut builder = encoder.begin(SECOND_MS);
    builder.add(3, &record, None, &Masker::default()).unwrap();
    let (data, _) = builder.finish().unwrap();
    let raw = Unpacker::new().unwrap().unpack(data).unwrap();
    let block = DecodedBlock::read(&raw, |_| true).unwrap();
    let kept = block.columns(&block.rows[0].1, "acme--api").attempts;
    let first = attempts[..ATTEMPTS_MAX].iter().map(RecordedAttempt::view);
    assert_eq!(kept, first.collect::<Vec<_>>());
}
