//! Proofs asked of servers that lie, fail or are silent.

#![allow(clippy::unwrap_used, reason = "tests stop at the first surprise")]

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use hickory_proto::op::{Message, Query};
use hickory_proto::rr::rdata::{CNAME, NS, TXT};
use hickory_proto::rr::{DNSClass, RData, Record};

use super::*;

const DOMAIN: &str = "api.customer.test";
const RECORD: &str = "_gw-domain.api.customer.test.";
const SERVICE: &str = "orders.eu1.example.test";
const TOKEN: &str = "gw-0123456789";

#[derive(Clone, Copy, PartialEq, Eq)]
enum Transport {
    Udp,
    Tcp,
}

/// Changes an answer without records, or drops it.
type Reply = dyn Fn(Message, Transport) -> Option<Message> + Send + Sync;

/// A DNS server whose answers a test writes. It ends with its owner.
struct Fake {
    address: SocketAddr,
    questions: Arc<AtomicUsize>,
    is_ending: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Fake {
    fn start(
        reply: impl Fn(Message, Transport) -> Option<Message> + Send + Sync + 'static,
    ) -> Self {
        let (udp, tcp) = sockets();
        let address = udp.local_addr().unwrap();
        let reply: Arc<Reply> = Arc::new(reply);
        let questions = Arc::new(AtomicUsize::new(0));
        let is_ending = Arc::new(AtomicBool::new(false));
        let over_udp = {
            let reply = Arc::clone(&reply);
            let questions = Arc::clone(&questions);
            let is_ending = Arc::clone(&is_ending);
            thread::spawn(move || serve_udp(&udp, &*reply, &questions, &is_ending))
        };
        let over_tcp = {
            let is_ending = Arc::clone(&is_ending);
            thread::spawn(move || serve_tcp(&tcp, &*reply, &is_ending))
        };
        Self {
            address,
            questions,
            is_ending,
            threads: vec![over_udp, over_tcp],
        }
    }

    /// Serves these records truthfully.
    fn with(records: Vec<Record>) -> Self {
        Self::start(move |answer, _| Some(filled(answer, &records)))
    }

    fn look_up(&self) -> Result<Ownership, AcmeError> {
        look_up(&[self.address], DOMAIN, Some(SERVICE), TOKEN)
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.is_ending.store(true, Ordering::SeqCst);
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        socket.send_to(&[], self.address).unwrap();
        TcpStream::connect(self.address).unwrap();
        for thread in self.threads.drain(..) {
            thread.join().unwrap();
        }
    }
}

fn sockets() -> (UdpSocket, TcpListener) {
    loop {
        let tcp = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        if let Ok(udp) = UdpSocket::bind(tcp.local_addr().unwrap()) {
            return (udp, tcp);
        }
    }
}

fn serve_udp(udp: &UdpSocket, reply: &Reply, questions: &AtomicUsize, is_ending: &AtomicBool) {
    let mut buffer = [0; 512];
    loop {
        let (length, from) = udp.recv_from(&mut buffer).unwrap();
        if is_ending.load(Ordering::SeqCst) {
            return;
        }
        questions.fetch_add(1, Ordering::SeqCst);
        if let Some(answer) = reply(empty(&buffer[..length]), Transport::Udp) {
            udp.send_to(&answer.to_vec().unwrap(), from).unwrap();
        }
    }
}

fn serve_tcp(tcp: &TcpListener, reply: &Reply, is_ending: &AtomicBool) {
    loop {
        let (mut stream, _) = tcp.accept().unwrap();
        if is_ending.load(Ordering::SeqCst) {
            return;
        }
        let mut length = [0; 2];
        stream.read_exact(&mut length).unwrap();
        let mut question = vec![0; usize::from(u16::from_be_bytes(length))];
        stream.read_exact(&mut question).unwrap();
        let Some(answer) = reply(empty(&question), Transport::Tcp) else {
            continue;
        };
        let answer = answer.to_vec().unwrap();
        let length = u16::try_from(answer.len()).unwrap().to_be_bytes();
        stream
            .write_all(&[&length[..], &answer[..]].concat())
            .unwrap();
    }
}

/// An answer to `question` without records.
fn empty(question: &[u8]) -> Message {
    let question = Message::from_vec(question).unwrap();
    let mut answer = Message::response(question.metadata.id, question.metadata.op_code);
    answer.metadata.recursion_available = true;
    answer.add_queries(question.queries.clone());
    answer
}

/// The answer with those of `records` that the question asks for.
fn filled(mut answer: Message, records: &[Record]) -> Message {
    let query = answer.queries[0].clone();
    let mut owner = query.name.clone();
    // As a resolver: the records that CNAME records lead to are in the answer, too.
    for _ in 0..=records.len() {
        let is_asked = |record: &&Record| {
            let kinds = [query.query_type, RecordType::CNAME];
            record.name == owner && kinds.contains(&record.record_type())
        };
        let found: Vec<Record> = records.iter().filter(is_asked).cloned().collect();
        answer.add_answers(found.clone());
        match found.first().map(|record| &record.data) {
            Some(RData::CNAME(target)) if query.query_type != RecordType::CNAME => {
                owner = target.0.clone();
            }
            _ => break,
        }
    }
    answer
}

fn name(text: &str) -> Name {
    name_of(text).unwrap()
}

fn cname(owner: &str, target: &str) -> Record {
    Record::from_rdata(name(owner), 60, RData::CNAME(CNAME(name(target))))
}

fn txt(owner: &str, strings: &[&str]) -> Record {
    let strings = strings.iter().map(|string| (*string).to_owned()).collect();
    Record::from_rdata(name(owner), 60, RData::TXT(TXT::new(strings)))
}

fn not_proved(result: Result<Ownership, AcmeError>) -> String {
    match result {
        Ok(Ownership::NotProved(reason)) => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_cname_record_or_a_txt_record_with_the_token_proves_a_domain() {
    let upper = [DOMAIN, SERVICE].map(str::to_ascii_uppercase);
    let rows = [
        (vec![cname(DOMAIN, SERVICE)], Ownership::Cname),
        (vec![cname(&upper[0], &upper[1])], Ownership::Cname),
        (
            vec![cname(DOMAIN, "a.test"), cname("a.test", SERVICE)],
            Ownership::Cname,
        ),
        (vec![txt(RECORD, &[TOKEN])], Ownership::Txt),
        (
            vec![txt(RECORD, &["gw-01", "", "23456789"])],
            Ownership::Txt,
        ),
        (
            vec![txt(RECORD, &["v=spf1 -all"]), txt(RECORD, &[TOKEN])],
            Ownership::Txt,
        ),
        (
            vec![cname(RECORD, "proofs.test"), txt("proofs.test", &[TOKEN])],
            Ownership::Txt,
        ),
        (
            vec![cname(DOMAIN, "elsewhere.test"), txt(RECORD, &[TOKEN])],
            Ownership::Txt,
        ),
    ];
    for (records, proof) in rows {
        let fake = Fake::with(records.clone());
        assert_eq!(fake.look_up().unwrap(), proof, "{records:?}");
    }
    let fake = Fake::with(vec![cname(DOMAIN, SERVICE)]);
    let dotted = look_up(
        &[fake.address],
        "API.customer.test.",
        Some("Orders.eu1.example.test."),
        TOKEN,
    );
    assert_eq!(dotted.unwrap(), Ownership::Cname);
}

#[test]
fn without_an_alias_that_counts_only_the_token_proves_a_domain() {
    let alias = cname(DOMAIN, SERVICE);
    let look_up = |fake: &Fake| look_up(&[fake.address], DOMAIN, None, TOKEN);
    let reason = not_proved(look_up(&Fake::with(vec![alias.clone()])));
    let expected = "api.customer.test: DNS does not show that it belongs to the account: the TXT \
                    record _gw-domain.api.customer.test. does not have the token (there is no TXT \
                    record), and a CNAME record is no proof, because an earlier account had the \
                    same id; set this record and wait until the old one's TTL has passed: \
                    `_gw-domain.api.customer.test. TXT \"gw-0123456789\"`";
    assert_eq!(reason, expected);
    let both = Fake::with(vec![alias, txt(RECORD, &[TOKEN])]);
    assert_eq!(look_up(&both).unwrap(), Ownership::Txt);
}

#[test]
fn a_domain_without_a_record_names_what_is_there_and_what_to_set() {
    let rows = [
        (vec![], "there is no CNAME record"),
        (vec![], "there is no TXT record"),
        (vec![cname(DOMAIN, "other.test")], "it leads to other.test."),
        // The service's name is no alias of itself, and a name below it is another one.
        (vec![cname(SERVICE, DOMAIN)], "there is no CNAME record"),
        (
            vec![cname(DOMAIN, "a.orders.eu1.example.test")],
            "it leads to a.orders.eu1.example.test.",
        ),
        (vec![txt(RECORD, &["gw-012345678"])], "\"gw-012345678\""),
        (vec![txt(RECORD, &["gw-01234567890"])], "\"gw-01234567890\""),
        (vec![txt(RECORD, &["GW-0123456789"])], "\"GW-0123456789\""),
        (vec![txt(RECORD, &[" gw-0123456789"])], "\" gw-0123456789\""),
        (vec![txt(RECORD, &["\u{1b}[31m\n"])], r#""\x1b[31m\n""#),
        (vec![txt(DOMAIN, &[TOKEN])], "there is no TXT record"),
    ];
    for (records, found) in rows {
        let reason = not_proved(Fake::with(records).look_up());
        assert!(reason.contains(found), "{found}: {reason}");
        for record in [
            "`api.customer.test. CNAME orders.eu1.example.test.`",
            "`_gw-domain.api.customer.test. TXT \"gw-0123456789\"`",
        ] {
            assert!(reason.contains(record), "{reason}");
        }
    }
    let long = "a".repeat(250);
    let many = (0..40).map(|_| txt(RECORD, &[&long])).collect();
    let reason = not_proved(Fake::with(many).look_up());
    assert!(reason.contains("40 records, such as"), "{reason}");
    assert!(reason.len() < 1000, "{reason}");
    let absent = Fake::start(|mut answer, _| {
        answer.metadata.response_code = ResponseCode::NXDomain;
        Some(answer)
    });
    let reason = not_proved(absent.look_up());
    assert!(reason.contains("it does not exist"), "{reason}");
}

#[test]
fn a_chain_is_followed_to_its_bound_and_a_circle_ends() {
    let chain = |length: usize| {
        let host = |at: usize| match at {
            0 => DOMAIN.to_owned(),
            at if at == length => SERVICE.to_owned(),
            at => format!("{at}.test"),
        };
        Fake::with(
            (0..length)
                .map(|at| cname(&host(at), &host(at + 1)))
                .collect(),
        )
    };
    assert_eq!(chain(CNAMES_MAX).look_up().unwrap(), Ownership::Cname);
    let reason = not_proved(chain(CNAMES_MAX + 1).look_up());
    assert!(reason.contains("follow each other"), "{reason}");

    let circle = Fake::with(vec![
        cname(DOMAIN, "a.test"),
        cname("a.test", DOMAIN),
        cname(RECORD, RECORD),
    ]);
    let reason = not_proved(circle.look_up());
    assert!(reason.contains("circle"), "{reason}");
    assert_eq!(circle.questions.load(Ordering::SeqCst), CNAMES_MAX + 2);
}

#[test]
fn records_of_other_names_and_classes_prove_nothing() {
    let in_class = |class, mut record: Record| {
        record.dns_class = class;
        record
    };
    let lies = [
        vec![cname("other.test", SERVICE)],
        vec![txt("_gw-domain.other.test", &[TOKEN])],
        vec![txt("customer.test", &[TOKEN]), txt(DOMAIN, &[TOKEN])],
        vec![cname("other.test", "end.test"), txt("end.test", &[TOKEN])],
        // The chain begins at the question and goes elsewhere.
        vec![cname(RECORD, "a.test"), txt(RECORD, &[TOKEN])],
        vec![in_class(DNSClass::CH, cname(DOMAIN, SERVICE))],
        vec![in_class(DNSClass::CH, txt(RECORD, &[TOKEN]))],
    ];
    for lie in lies {
        let records = lie.clone();
        let fake = Fake::start(move |mut answer, _| {
            answer.add_answers(records.clone());
            answer.add_additionals([cname(DOMAIN, SERVICE), txt(RECORD, &[TOKEN])]);
            answer.add_authorities([cname(DOMAIN, SERVICE), txt(RECORD, &[TOKEN])]);
            Some(answer)
        });
        let reason = not_proved(fake.look_up());
        assert!(reason.contains("set one of these records"), "{lie:?}");
    }
}

#[test]
fn answers_to_another_question_are_no_answers() {
    let truth = || vec![cname(DOMAIN, SERVICE), txt(RECORD, &[TOKEN])];
    let lies: [fn(&mut Message); 6] = [
        |answer| answer.metadata.id = answer.metadata.id.wrapping_add(1),
        |answer| answer.queries.clear(),
        |answer| answer.queries[0].name = name("other.test"),
        |answer| answer.queries[0].query_type = RecordType::A,
        |answer| answer.queries[0].query_class = DNSClass::CH,
        |answer| {
            answer.add_query(Query::query(name("other.test"), RecordType::TXT));
        },
    ];
    for (number, lie) in lies.into_iter().enumerate() {
        let fake = Fake::start(move |answer, _| {
            let mut answer = filled(answer, &truth());
            lie(&mut answer);
            Some(answer)
        });
        let error = fake.look_up().unwrap_err().to_string();
        assert!(error.contains("another question"), "{number}: {error}");
        assert!(error.contains("dns_servers"), "{number}: {error}");
    }
}

#[test]
fn a_wrong_guess_before_the_answer_changes_nothing() {
    let first = AtomicBool::new(true);
    let fake = Fake::start(move |answer, _| {
        let mut answer = filled(answer, &[cname(DOMAIN, SERVICE)]);
        if first.swap(false, Ordering::SeqCst) {
            answer.metadata.id = answer.metadata.id.wrapping_add(1);
        }
        Some(answer)
    });
    assert_eq!(fake.look_up().unwrap(), Ownership::Cname);
}

#[test]
fn a_cut_answer_proves_nothing_and_the_whole_one_comes_over_tcp() {
    let fake = Fake::start(|mut answer, transport| {
        answer.metadata.truncation = transport == Transport::Udp;
        let records = match transport {
            Transport::Udp => [cname(DOMAIN, SERVICE)],
            Transport::Tcp => [txt(RECORD, &[TOKEN])],
        };
        Some(filled(answer, &records))
    });
    assert_eq!(fake.look_up().unwrap(), Ownership::Txt);
}

#[test]
fn a_failing_server_leaves_the_proof_unknown_and_the_next_one_is_asked() {
    for code in [
        ResponseCode::ServFail,
        ResponseCode::Refused,
        ResponseCode::FormErr,
    ] {
        let failing = Fake::start(move |mut answer, _| {
            answer.metadata.response_code = code;
            answer.queries.clear();
            Some(answer)
        });
        let error = failing.look_up().unwrap_err();
        assert_eq!(error.kind, crate::FailureKind::Proof);
        for part in [&*code.to_string(), &failing.address.to_string(), RECORD] {
            assert!(error.message.contains(part), "{error}");
        }
        let good = Fake::with(vec![txt(RECORD, &[TOKEN])]);
        let servers = [failing.address, good.address];
        let found = look_up(&servers, DOMAIN, Some(SERVICE), TOKEN).unwrap();
        assert_eq!(found, Ownership::Txt);
        let asked = failing.questions.load(Ordering::SeqCst);
        assert_eq!(asked, 3, "the server that answered is asked first");
    }
}

#[test]
fn one_failing_question_leaves_unknown_what_the_other_does_not_prove() {
    let failing = |kind: RecordType, records: Vec<Record>| {
        Fake::start(move |mut answer, _| {
            if answer.queries[0].query_type == kind {
                answer.metadata.response_code = ResponseCode::ServFail;
            }
            Some(filled(answer, &records))
        })
    };
    let without_cname = failing(RecordType::CNAME, vec![txt(RECORD, &[TOKEN])]);
    assert_eq!(without_cname.look_up().unwrap(), Ownership::Txt);
    let without_txt = failing(RecordType::TXT, vec![cname(DOMAIN, SERVICE)]);
    assert_eq!(without_txt.look_up().unwrap(), Ownership::Cname);
    for kind in [RecordType::CNAME, RecordType::TXT] {
        let error = failing(kind, Vec::new()).look_up().unwrap_err();
        assert!(error.message.starts_with(&kind.to_string()), "{error}");
    }
}

#[test]
fn a_server_that_names_other_servers_has_not_answered() {
    let fake = Fake::start(|mut answer, _| {
        answer.metadata.recursion_available = false;
        let servers = RData::NS(NS(name("ns.customer.test")));
        answer.add_authority(Record::from_rdata(name("customer.test"), 60, servers));
        Some(answer)
    });
    let error = fake.look_up().unwrap_err().to_string();
    assert!(error.contains("it is not a resolver"), "{error}");
}

#[test]
fn silence_ends_at_the_deadline() {
    let fake = Fake::start(|_, _| None);
    let deadline = Instant::now() + Duration::from_millis(200);
    let resolvers = Resolvers::new(&[fake.address], deadline);
    let error = look_up_at(resolvers, DOMAIN, Some(SERVICE), TOKEN).unwrap_err();
    assert!(error.message.contains(RECORD), "{error}");
}

#[test]
fn names_that_dns_cannot_have_are_refused() {
    for domain in ["", "a..test", &"a".repeat(64), &"a.".repeat(128)] {
        let error = look_up(&[], domain, Some(SERVICE), TOKEN).unwrap_err();
        assert!(error.message.contains("DNS name"), "{domain}: {error}");
    }
}
